"""DiLoCo inside training scripts that exist: Hugging Face `Trainer`, Accelerate, Lightning; and what they share."""
