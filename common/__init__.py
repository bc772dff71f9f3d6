"""What the training scripts share and a researcher changing an algorithm never needs to open."""
