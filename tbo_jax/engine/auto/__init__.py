"""`USE_TBO=auto`: which buckets are split, timed on the device and kept on disk."""
