"""Keeps what a trial writes and deletes away from the user's files: the kernel does it, by one of three means.

| kind      | what the trial sees                                                    | needs                       |
|-----------|------------------------------------------------------------------------|-----------------------------|
| namespace | all files; its writes and deletions go to a scratch folder (overlayfs) | mount (and user) namespaces |
| landlock  | all files, but it may write into its scratch folder only               | Linux 5.13                  |
| none      | the files themselves                                                   | --in-place                  |

This file is also the program that each trial is started with: it isolates itself, then runs the command. As such it
imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Kind = Literal["namespace", "landlock", "none"]
# For tests: which of the means to use, whatever the system has.
FORCED = "FULLTILT_TRIAL_ISOLATION"
TOLD = {
    "namespace": "trials change none of your files: each one writes into a scratch folder laid over them (overlayfs)",
    "landlock": (
        "trials may write into their scratch folder only (Landlock); torch.save, safetensors and save_pretrained are "
        "pointed there, and any other write outside of it fails"
    ),
    "none": "trials run in place (--in-place): what the script writes, overwrites or deletes is real",
}
PROBE_LIMIT_S = 20.0
SCRATCH_PREFIX = "fulltilt-trial-"
# A scratch folder that nobody has locked by then is of a study that was killed.
STALE_S = 60.0
_locks: dict[Path, int] = {}
# Exits with these mean that the trial could not be isolated, so that no line of the script has run.
CANNOT_ISOLATE = 117

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 8192, 16384, 1 << 18
SYS_MOUNT_SETATTR, SYS_LANDLOCK = 442, 444
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
# Not laid over: what is no file of anybody's, and what belongs to the system, which a trial may only read.
DEVICES = ("/proc", "/sys", "/dev")
SYSTEM = (*DEVICES, "/run", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/snap")


@dataclass(frozen=True, slots=True)
class Isolation:
    """How trials are kept apart. ``own_pids``: in a PID namespace; ``in_memory``: writes go to a tmpfs."""

    kind: Kind
    own_pids: bool = False
    in_memory: bool = False
    with_user: bool = False

    @property
    def sentence(self) -> str:
        """What the user is told."""
        return TOLD[self.kind]

    def scratch(self) -> Path:
        """A new private folder for what one trial writes; `remove_scratch` takes it away."""
        base = "/var/tmp" if self.kind == "namespace" and not self.in_memory else tempfile.gettempdir()
        _remove_stale(base)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=base)).resolve()
        _lock(scratch)
        return scratch

    def command(self, command: Sequence[str], scratch: Path, *writable: Path) -> list[str]:
        """The command of an isolated trial; what it writes into the ``writable`` folders is really there."""
        plan = {**asdict(self), "scratch": str(scratch), "study": os.getpid()}
        plan["writable"] = [str(folder.resolve()) for folder in writable]
        places = [Path.cwd(), Path.home().resolve(), _script_folder(command)]
        plan["cwd"], plan["needed"] = str(Path.cwd()), sorted(_needed(places, self.with_user))
        plan["more"] = _own_folders() if self.with_user else []
        if not sys.platform.startswith("linux"):
            return list(command)
        return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), json.dumps(plan), *command]


def choose(in_place: bool = False) -> tuple[Isolation | None, list[str]]:
    """The best isolation that this system really has, tried out; None with the reasons where it has none."""
    forced = os.environ.get(FORCED)
    if in_place or forced == "none":
        return (Isolation("none") if in_place else None), ["switched off"]
    if not sys.platform.startswith("linux"):
        return None, [f"{sys.platform} has neither mount namespaces nor Landlock"]
    reasons = []
    for isolation in _candidates():
        if forced and isolation.kind != forced:
            continue
        why_not = _try_out(isolation)
        if why_not is None:
            return isolation, []
        if why_not not in reasons:
            reasons.append(why_not)
    return None, reasons


def _candidates() -> Iterator[Isolation]:
    disk = not {Path.cwd(), Path.home()} & {Path("/var"), Path("/var/tmp")}  # the scratch folder cannot lie below
    for with_user in (False, True) if os.geteuid() == 0 else (True,):
        for own_pids in (True, False):
            for in_memory in (False, True) if disk and os.access("/var/tmp", os.W_OK) else (True,):
                yield Isolation("namespace", own_pids, in_memory, with_user)
    yield Isolation("landlock")


# What has to work in a trial, and must be refused or leave no trace outside.
_TRIAL = """
import os, sys
if sys.argv[1] == "namespace":
    os.rmdir("there"); os.mkdir("there"); open("there/new", "w").close(); open("/dev/shm/fulltilt-probe", "w").close()
    os.stat("/proc/self/exe")
else:
    try: open("new", "w")
    except PermissionError: pass
    else: sys.exit("Landlock does not keep a process from writing")
"""


def _try_out(isolation: Isolation) -> str | None:
    """Why the isolation does not work here; None where it does."""
    scratch, place = isolation.scratch(), Path(tempfile.mkdtemp(prefix="fulltilt-probe-"))
    try:
        (place / "there").mkdir()
        (place / "folder").mkdir()
        command = isolation.command(
            [sys.executable, "-I", "-S", "-c", _TRIAL, isolation.kind], scratch, place / "folder"
        )
        plan = json.loads(command[4])
        needed = [*plan["needed"], *_needed([place.resolve()], isolation.with_user)]
        command[4] = json.dumps({**plan, "cwd": str(place.resolve()), "needed": needed})
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            cwd=place,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        if sorted(os.listdir(place)) != ["folder", "there"] or any((place / "there").iterdir()):
            return f"the isolation by {isolation.kind} does not hold"
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        remove_scratch(scratch)
        remove_scratch(place)


def _lock(scratch: Path) -> bool:
    """Mark a scratch folder as in use for as long as this process lives; False where another process uses it."""
    if fcntl is not None:
        descriptor = os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        _locks[scratch] = descriptor
    return True


def _remove_stale(base: str) -> None:
    """Delete the scratch folders of studies that were killed."""
    for folder in Path(base).glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            is_old = time.time() - folder.lstat().st_mtime > STALE_S
            if is_old and _is_own(folder) and not folder.is_symlink() and folder not in _locks and _lock(folder):
                remove_scratch(folder)


def remove_scratch(scratch: Path) -> None:
    """Delete a folder that `mkdtemp` made for a trial, with what overlayfs and the trial left in it."""
    if scratch in _locks:
        os.close(_locks.pop(scratch))
    for folder, names, _ in os.walk(scratch):
        for name in names:
            if not os.path.islink(f"{folder}/{name}"):
                with contextlib.suppress(OSError):
                    os.chmod(f"{folder}/{name}", stat.S_IRWXU)  # overlayfs has folders that nobody may read
    shutil.rmtree(scratch, ignore_errors=True)


def _needed(places: Sequence[Path], with_user: bool) -> set[str]:
    """The folders that must be laid over for a job in these places.

    In a user namespace only what its user owns can be copied into a layer, folders on the way included: so a folder of
    theirs in one of somebody else's gets a layer of its own.
    """
    found: set[str] = set()
    for place in filter(Path.is_dir, places):
        way = [each for each in (place, *place.parents[:-1]) if _is_own(each) and not _is_own(each.parent)]
        found.update(map(str, way if with_user and way else [place]))
    return found


def _own_folders(limit_s: float = 0.5, most: int = 100) -> list[str]:
    """Other folders of this user's that lie in folders of somebody else's, as far as they are found in this time."""
    deadline, found = time.monotonic() + limit_s, list[str]()
    todo = [(top, 0) for top in _subfolders("/") if top not in SYSTEM]
    for folder, depth in todo:  # grows meanwhile
        if time.monotonic() > deadline:
            break
        for entry in _subfolders(folder):
            if not _is_own(entry):
                todo += [(entry, depth + 1)] if depth < 2 else []
            elif depth:
                found.append(entry)
    return found[:most]


def _subfolders(folder: str, most: int = 300) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in itertools.islice(entries, most) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_own(folder: str | Path) -> bool:
    try:
        return os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def _script_folder(command: Sequence[str]) -> Path:
    script = next((word for word in command if word.endswith(".py")), ".")
    return Path(script).resolve().parent if script != "." else Path.cwd()


def descendants(pid: int) -> list[int]:
    """All processes below a process, by the kernel's own lists."""
    found, todo = [], [pid]
    while todo:
        above = todo.pop()
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{above}/task"):
                below = [int(word) for word in Path(f"/proc/{above}/task/{thread}/children").read_text().split()]
                found += below
                todo += below
    return found


def kill_below(pid: int) -> None:
    """Kill everything below a process, also what is started meanwhile."""
    for _ in range(20):
        below = descendants(pid)
        if not below:
            return
        for each in below:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


# --------------------------------------------------------------------------- inside the trial's process


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def _call(what: str, function: str, *arguments: object) -> int:
    """Call a function of the C library. Raises OSError that says what was refused."""
    given = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    result = getattr(_libc, function)(*given)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    what = f"mount {kind or 'bind'} on {target}"
    _call(what, "mount", source, target, kind, ctypes.c_ulong(flags), options)


def _main(plan: dict[str, Any], command: list[str]) -> int:
    """Isolate this process, run the command below it, and return its exit status: 128 and the signal if killed."""
    _call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # with the study, its trial ends
    if os.getppid() != plan["study"]:
        return 1
    try:
        if plan["kind"] == "namespace":
            _enter_namespaces(plan["with_user"], plan["own_pids"])
            if plan["own_pids"] and (first := os.fork()):
                return _status_of(first)
            _call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            _lay_over(plan)
        elif plan["kind"] == "landlock":
            _restrict([plan["scratch"], *plan["writable"], "/dev", "/proc"])
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"fulltilt: this trial cannot be kept from your files: {error.strerror}{where}", file=sys.stderr)
        return CANNOT_ISOLATE
    _call("prctl", "prctl", PR_SET_CHILD_SUBREAPER, 1)
    job = os.fork()
    if job == 0:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"fulltilt: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    status = _status_of(job)
    if not plan["own_pids"]:  # else they end with this process, the first of its namespace
        kill_below(os.getpid())
    return status


def _status_of(pid: int) -> int:
    """Wait for a child, reaping orphans on the way."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _enter_namespaces(with_user: bool, own_pids: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | (CLONE_NEWPID if own_pids else 0) | (CLONE_NEWUSER if with_user else 0)
    _call("a new mount namespace", "unshare", flags)
    if with_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)


def _lay_over(plan: dict[str, Any]) -> None:
    """Lay an empty, writable layer over every folder that is not the system's; all else becomes read-only."""
    scratch, writable = plan["scratch"], dict(enumerate(plan["writable"]))
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    if plan["in_memory"]:
        _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, "mode=700")
    else:
        _mount(scratch, scratch, None, MS_BIND)  # a mount of its own stays writable
    home = f"/proc/self/fd/{os.open(scratch, os.O_PATH)}"  # the path itself may be laid over
    for number, folder in writable.items():
        os.mkdir(f"{home}/writable-{number}")
        _mount(folder, f"{home}/writable-{number}", None, MS_BIND)
    points = [point for point in _mount_points() if not _is_below(point, (scratch, *DEVICES))]
    # No layer may lie inside of what it covers; in a user namespace, neither may another mount.
    apart = [*([] if plan["in_memory"] else [scratch]), *(points if plan["with_user"] else [])]
    targets = list(_folders_to_cover("/", apart))
    needed = [path for path in plan["needed"] if path != "/" and not _is_below(path, DEVICES)]
    targets += [path for path in needed if plan["with_user"] or not _is_below(path, targets)]
    targets += [path for path in plan["more"] if not _is_below(path, needed)]
    # A mount below a folder that is laid over is put onto its cover, so shallow ones come first.
    covered = sorted({path for path in (*targets, *points) if _is_below(path, targets)} - {scratch}, key=len)
    for point in points:
        _make_read_only(point)
    for number, target in enumerate(covered):
        try:
            _cover(target, f"{home}/{number}", plan["with_user"])
        except OSError:
            if any(_is_below(path, [target]) for path in needed):
                raise
            _mount(target, f"{home}/{number}/merged", None, MS_BIND | MS_REC)  # as it is, read-only
    for number, target in enumerate(covered):
        _mount(f"{home}/{number}/merged", target, None, MS_MOVE)
    _private_shared_memory(f"{home}/shared", plan["with_user"])
    for number, folder in writable.items():
        _mount(f"{home}/writable-{number}", folder, None, MS_MOVE)
    if plan["own_pids"]:
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    os.chdir(plan["cwd"])


def _private_shared_memory(layer: str, with_user: bool) -> None:
    """A /dev/shm of the same size that ends with the trial; laid over the real one where data lie in that."""
    found = os.statvfs("/dev/shm")
    os.mkdir(layer)
    _mount("tmpfs", layer, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={found.f_blocks * found.f_frsize}")
    if _subfolders("/dev/shm"):
        _cover("/dev/shm", f"{layer}/cover", with_user)
        layer = f"{layer}/cover/merged"
    _mount(layer, "/dev/shm", None, MS_MOVE)


def _cover(target: str, layer: str, with_user: bool) -> None:
    """Prepare what will stand at ``target``: an overlay over the folder, or the file itself, read-only."""
    os.mkdir(layer)
    if not os.path.isdir(target):
        os.close(os.open(f"{layer}/merged", os.O_CREAT | os.O_WRONLY))
        _mount(target, f"{layer}/merged", None, MS_BIND)
        return
    for name in ("upper", "work", "merged"):
        os.mkdir(f"{layer}/{name}")
    found = os.stat(target)
    with contextlib.suppress(OSError):  # a folder of another user's stays theirs
        os.chmod(f"{layer}/upper", stat.S_IMODE(found.st_mode))
        os.chown(f"{layer}/upper", found.st_uid, found.st_gid)
    escaped = target.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    options = f"lowerdir={escaped},upperdir={layer}/upper,workdir={layer}/work{',userxattr' if with_user else ''}"
    _mount("overlay", f"{layer}/merged", "overlay", MS_NOSUID | MS_NODEV, options)


def _folders_to_cover(folder: str, apart: Sequence[str]) -> Iterator[str]:
    """The folders below ``folder`` that are laid over as a whole; those with one of ``apart`` in them part by part."""
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.is_dir(follow_symlinks=False) or entry.path in SYSTEM:
                continue
            if any(path.startswith(f"{entry.path}/") for path in apart):
                yield from _folders_to_cover(entry.path, apart)
            else:
                yield entry.path


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines]
    return [os.fsdecode(point) for point in points]


def _make_read_only(point: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY, 0, 0, 0)
    number, size = ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_size_t(ctypes.sizeof(attributes))
    try:
        _call(f"making {point} read-only", "syscall", number, -100, point, 0, attributes, size)
    except OSError as error:
        # Hidden below another mount, or where this user cannot go: nor can the trial.
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EINVAL):
            raise


def _restrict(writable: Sequence[str]) -> None:
    """Landlock: from now on this process and all below it may write, make and remove only below ``writable``."""
    number = ctypes.c_long(SYS_LANDLOCK)
    version = _call("Landlock", "syscall", number, None, ctypes.c_size_t(0), 1)
    # Writing; removing and making files and folders; moving between folders; truncating.
    rights = (
        1 << 1
        | sum(1 << bit for bit in range(4, 13))
        | (1 << 13 if version >= 2 else 0)
        | (1 << 14 if version >= 3 else 0)
    )
    handled = ctypes.c_uint64(rights)
    rules = _call("Landlock", "syscall", number, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    for path in writable:
        place = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder), 12)
        _call("Landlock", "syscall", ctypes.c_long(SYS_LANDLOCK + 1), rules, 1, rule, 0)
        os.close(place)
    _call("Landlock", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("Landlock", "syscall", ctypes.c_long(SYS_LANDLOCK + 2), rules, 0)


if __name__ == "__main__":
    os._exit(_main(json.loads(sys.argv[1]), sys.argv[2:]))
