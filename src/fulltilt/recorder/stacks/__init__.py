"""What the training thread is at, seen by samples of its Python stack."""
