"""The CPU platform on which DSA models run."""
