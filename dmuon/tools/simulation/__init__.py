"""What a step would take on machines that are not at hand: presets, modelled costs, messages and a recurrence."""
