"""What selects positions."""
