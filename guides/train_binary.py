"""`python train_binary.py` and `TRAINER_LOG_LEVEL=DEBUG python train_binary.py`.

It is `fulltilt train hdf5` with the config object below; set there what you want otherwise:

    cfg.data = "/DEVELOPMENT/DATASET_REFERENCE"         a folder of HDF5 files; otherwise synthetic data
    cfg.stage_dir = "/mnt/ramdisk"
    cfg.batch_size, cfg.val_batch_size = 5632, 2048
    cfg.num_workers, cfg.prefetch_factor = 4, 8

A flag wins over it: `fulltilt train hdf5 --help`.
"""

import sys

try:
    from fulltilt.cli.main import main
    from fulltilt.recipes import hdf5
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install '.[train,recipes,hdf5]'")

cfg = hdf5.Config()

if __name__ == "__main__":
    hdf5.RECIPE = cfg.recipe()
    main(["train", "hdf5", *sys.argv[1:]])
