"""Makes Trainers of transformers and TRL shard their model, save it, and continue."""
