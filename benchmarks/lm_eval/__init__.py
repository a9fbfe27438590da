"""An exported model in the LM Evaluation Harness, compared with this project's own evaluation."""
