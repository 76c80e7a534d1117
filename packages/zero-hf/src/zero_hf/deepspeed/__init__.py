"""What DeepSpeed's users have, read here: their JSON, their checkpoints and their loop. DeepSpeed is not needed."""
