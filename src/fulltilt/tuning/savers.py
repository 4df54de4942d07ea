"""Where libraries write files past Python's own calls, and read them again: what a trial puts aside (`saves.py`)."""

from __future__ import annotations

# The module, the attribute, the place of the path among the arguments (self counted), and its name.
Entries = dict[str, tuple[tuple[str, int, str], ...]]

SAVERS: Entries = {
    "torch": (("save", 1, "f"),),
    "torch.jit": (("save", 1, "f"),),
    "torch.jit._serialization": (("save", 1, "f"), ("save_jit_module_to_flatbuffer", 1, "f")),
    "torch.jit._script": (("RecursiveScriptModule.save", 1, "f"), ("ScriptModule.save", 1, "f")),
    "torch.export": (("save", 1, "f"),),
    "torch.package.package_exporter": (("PackageExporter.__init__", 1, "f"),),
    "torch.profiler.profiler": (("_KinetoProfile.export_chrome_trace", 1, "path"),),
    "torch.autograd.profiler": (("profile.export_chrome_trace", 1, "path"),),
    "torchvision.io": (("write_file", 0, "filename"),),
    "torchvision.io.image": (("write_file", 0, "filename"),),
    "pyarrow.parquet.core": (("ParquetWriter.__init__", 1, "where"),),
    "pyarrow.feather": (("write_feather", 1, "dest"),),
    "pyarrow.csv": (("write_csv", 1, "output_file"),),
    "safetensors.torch": (("save_file", 1, "filename"), ("save_model", 1, "filename")),
    "safetensors.numpy": (("save_file", 1, "filename"),),
    "transformers.modeling_utils": (("PreTrainedModel.save_pretrained", 1, "save_directory"),),
    "transformers.tokenization_utils_base": (("PreTrainedTokenizerBase.save_pretrained", 1, "save_directory"),),
    "transformers.configuration_utils": (
        ("PretrainedConfig.save_pretrained", 1, "save_directory"),
        ("PreTrainedConfig.save_pretrained", 1, "save_directory"),
    ),
    "transformers.trainer": (("Trainer.save_model", 1, "output_dir"),),
    "accelerate.accelerator": (
        ("Accelerator.save_state", 1, "output_dir"),
        ("Accelerator.save_model", 2, "save_directory"),
    ),
    "lightning.fabric.utilities.cloud_io": (("_atomic_save", 1, "filepath"),),
    "lightning.fabric.plugins.io.torch_io": (("_atomic_save", 1, "filepath"),),
    "pytorch_lightning.plugins.io.torch_plugin": (("_atomic_save", 1, "filepath"),),
}
LOADERS: Entries = {
    "torch": (("load", 0, "f"),),
    "torch.jit": (("load", 0, "f"),),
    "torch.jit._serialization": (("load", 0, "f"),),
    "torch.export": (("load", 0, "f"),),
    "torchvision.io": (("read_file", 0, "path"),),
    "torchvision.io.image": (("read_file", 0, "path"),),
    "pyarrow.parquet": (("read_table", 0, "source"),),
    "pyarrow.parquet.core": (("read_table", 0, "source"),),
    "safetensors.torch": (("load_file", 0, "filename"),),
}
