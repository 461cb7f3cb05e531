"""What a step computes, whichever residency brought the matrices here."""
