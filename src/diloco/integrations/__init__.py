"""DiLoCo in existing training scripts: the Hugging Face `Trainer`, Accelerate, Lightning, and their shared code."""
