"""What `penstock bench` measures, a file per subject."""
