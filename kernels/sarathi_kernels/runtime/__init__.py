"""What every kernel stands on: the chip, the launch, and checks."""
