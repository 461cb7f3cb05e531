"""What a step would take on machines that are not at hand: presets of hardware, modelled costs, a simulated step."""
