"""The overlap: batch and split, stages, and the schedules that run them. No model is known here."""
