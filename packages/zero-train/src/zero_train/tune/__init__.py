"""Fine-tunes by TRL's trainers, and measures held-out losses."""
