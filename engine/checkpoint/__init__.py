"""What a checkpoint's own files say of the model; without torch, so that a launcher can ask too."""
