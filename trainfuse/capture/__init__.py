"""What the user wrote, as a training graph."""
