"""What all evaluations share."""
