"""The engine's tests keep their files where those of its faults do."""

from tests.faults.conftest import tmp_path as tmp_path
