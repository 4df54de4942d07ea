"""Which files of a data set are pictures."""

# What Pillow reads and people train on.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
