"""From run folders to figures: validity, speed-ups with intervals, acceptance, the choice of a method."""
