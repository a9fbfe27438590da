"""An exported model in the LM Evaluation Harness, beside this project's own evaluation."""
