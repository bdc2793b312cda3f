"""What every method has: its entry in the list, its options' limits, how its mixture is told."""
