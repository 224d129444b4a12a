"""Reading of Hugging Face checkpoints: resolve a folder, check it, read its tensors."""
