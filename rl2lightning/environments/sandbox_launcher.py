"""Runs one program with as little as the system lets us leave it: the script behind `Sandbox`, standard library only.

Three processes: this one watches from outside, its child is the first process of new namespaces and builds the file
system the program sees, and the grandchild gives up its rights and becomes the program. When the child ends, so do all
processes in its namespace, however they were started.

Reads settings as JSON from stdin, writes the result as JSON to stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "random", "urandom")
INSIDE_UID = 65534  # "nobody", as which the program sees itself in a user namespace
INSIDE = Path("/sandbox")  # the program's own directory, under a file system of its own
POLL_SECONDS = 0.05

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def unshare(flags: int) -> bool:
    return libc.unshare(flags) == 0


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if x is None else x.encode() for x in (source, target, kind)]
    checked(libc.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


# -- before the program: rights ------------------------------------------------------------------------------------


def leave_namespaces(settings: dict[str, Any]) -> tuple[set[str], int | None]:
    """New namespaces, as far as they are permitted, for the children to come.

    Returns what the program is kept from, and the user id it is to run under (None: there is no other than ours).
    """
    kept: set[str] = set()
    if os.geteuid() == 0:
        uid = unused_uid()
    else:
        uid, gid, own = INSIDE_UID, os.getegid(), os.geteuid()
        if not unshare(NEWUSER):
            return kept, None
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE_UID} {own} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE_UID} {gid} 1")
    if uid is not None and os.geteuid() in (0, INSIDE_UID):
        kept.add("user")
    if unshare(NEWNET):
        kept.add("network")
    if unshare(NEWPID):
        kept.add("processes")
    unshare(NEWIPC)
    return kept, uid


def unused_uid() -> int | None:
    """A user id that nobody has, so that limits by user bind this program alone, and all it starts can be found."""
    try:
        spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        first, _, count = max((tuple(map(int, span)) for span in spans), key=lambda span: span[2])
    except (OSError, ValueError):
        first, count = 0, 1 << 16
    last = min(first + count, (1 << 31) - 2)
    if last - first < 1000:
        return None
    used = {entry.pw_uid for entry in pwd.getpwall()}
    system_random = random.SystemRandom()
    while (uid := system_random.randrange(first + (last - first) // 2, last)) in used:
        pass
    return uid


def limit(settings: dict[str, Any]) -> None:
    megabyte = 1 << 20
    for kind, value in (
        (resource.RLIMIT_CPU, settings["cpu_seconds"]),
        (resource.RLIMIT_AS, settings["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, settings["disk_mb"] * megabyte),
        (resource.RLIMIT_NPROC, settings["max_processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


# -- before the program: files -------------------------------------------------------------------------------------


def build_root(root: Path, settings: dict[str, Any], uid: int | None) -> None:
    """A file system of read-only system and Python directories, and a small one of its own; enters it."""
    if not unshare(NEWNS):
        checked(-1, "unshare")
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", str(root), "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    python = [part for path in settings["python"] for part in enterable(Path(path))]
    bound: list[Path] = []
    for path in map(Path, [*SYSTEM, *python, *settings["visible"]]):
        if not os.path.exists(path) or any(path.is_relative_to(other) for other in bound):
            continue
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and str(path) in SYSTEM:  # /bin -> usr/bin
            target.symlink_to(path.readlink())
            continue
        bind(path, target)
        read_only(target)
        bound.append(path)
    (root / "dev").mkdir(exist_ok=True)
    for name in DEVICES:
        bind(Path("/dev") / name, root / "dev" / name)
    (root / "dev/shm").symlink_to(INSIDE)
    (root / "proc").mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # refused where the machine hides parts of its own; the program goes without
        mount("proc", str(root / "proc"), "proc", NOSUID | NODEV | NOEXEC)
    own_directory = root / INSIDE.relative_to("/")
    own_directory.mkdir()
    limits = f"size={settings['disk_mb']}m,nr_inodes={settings['max_files'] + 2},mode=700"
    mount("tmpfs", str(own_directory), "tmpfs", NOSUID | NODEV, limits)
    if not (root / "tmp").exists():  # a Python that lives below /tmp is seen there
        (root / "tmp").symlink_to(INSIDE)
    mount("tmpfs", str(root), None, REMOUNT | RDONLY | NOSUID | NODEV)
    os.chroot(root)
    fill(str(INSIDE), settings, uid)


def enterable(path: Path) -> list[Path]:
    """The directory, or what is in it where only its owner may enter: a virtual environment made by mktemp, say."""
    if path.is_dir() and path.stat().st_mode & 0o005 != 0o005:
        return sorted(path.iterdir())
    return [path]


def bind(path: Path, target: Path) -> None:
    if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.touch()
    mount(str(path), str(target), None, BIND | REC)


def read_only(target: Path) -> None:
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID | NODEV, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, str(target).encode(), AT_RECURSIVE, attributes, 32)
    if result != 0:  # Linux before 5.12: this mount only, not those below it
        mount("none", str(target), None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def fill(directory: str, settings: dict[str, Any], uid: int | None) -> None:
    """The program's files, in a directory that belongs to it and that it starts in."""
    os.chdir(directory)
    for name, text in settings["files"].items():
        Path(name).write_text(text)
        own(name, uid)
    own(".", uid)


def own(path: str, uid: int | None) -> None:
    if uid is not None and os.geteuid() == 0:
        os.chown(path, uid, uid)


# -- the child and the grandchild ----------------------------------------------------------------------------------


def child(settings: dict[str, Any], kept: set[str], uid: int | None, root: Path, pipes: dict[str, int]) -> None:
    """First process of the namespaces: reports what it set up and how the program ended."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    status = os.fdopen(pipes["status"], "w")

    def report(**message: Any) -> None:
        status.write(json.dumps(message) + "\n")
        status.flush()

    reason = ""
    if {"processes", "user"} <= kept:  # without a pid namespace other processes could be read through /proc
        attempt = os.fork()  # a mount that fails half way must not be gone on with
        if attempt == 0:
            try:
                build_root(root, settings, uid)
            except OSError as error:
                print(error, file=sys.stderr)
                os._exit(1)
            os._exit(0)
        if os.waitpid(attempt, 0)[1] == 0:
            build_root(root, settings, uid)
            kept.add("filesystem")
        else:
            reason = "mounts are refused"
    if "filesystem" not in kept:
        fill(str(root), settings, uid)
    missing = sorted({"user", "network", "processes", "filesystem"} - kept)
    report(missing=missing, reason=reason)
    if set(missing) & set(settings["required"]):
        os._exit(0)
    program = os.fork()
    if program == 0:
        try:
            become(settings, uid, pipes)
        except BaseException as error:
            report(failed=str(error))
        os._exit(127)
    for name in ("stdout", "stderr"):
        os.close(pipes[name])
    while True:  # orphans end up here
        pid, code = os.waitpid(-1, 0)
        if pid == program:
            report(exit=os.waitstatus_to_exitcode(code))
            os._exit(0)


def become(settings: dict[str, Any], uid: int | None, pipes: dict[str, int]) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go where the machine runs out of memory
    os.setsid()
    os.umask(0o077)
    stdin = os.memfd_create("stdin")
    os.write(stdin, settings["stdin"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    for number, fd in enumerate((stdin, pipes["stdout"], pipes["stderr"])):
        os.dup2(fd, number)
    limit(settings)
    if uid is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    here = os.getcwd()
    os.execve(settings["command"][0], settings["command"], settings["environment"] | {"HOME": here, "TMPDIR": here})


# -- the watcher ---------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """All processes below one, itself included; orphans are handed to the child, or to us."""
    found, todo = [], [pid]
    while todo:
        found.append(current := todo.pop())
        try:
            for task in os.listdir(f"/proc/{current}/task"):
                todo += map(int, Path(f"/proc/{current}/task/{task}/children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def resident_mb(pids: list[int]) -> float:
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def too_many_files(root: Path, settings: dict[str, Any]) -> bool:
    """Whether a directory on disk has outgrown its limits; a file system of its own cannot."""
    size = count = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                size += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:
                continue
        count += 1 + len(names)
        if count > settings["max_files"] or size > settings["disk_mb"] << 20:
            return True
    return False


def watch(settings: dict[str, Any], pid: int, root: Path, pipes: dict[str, int]) -> dict[str, Any]:
    """Reads what the program writes until it ends, or until it must."""
    names = {fd: name for name, fd in pipes.items()}
    output: dict[str, bytes] = {name: b"" for name in pipes}
    poll = select.poll()
    for fd in names:
        poll.register(fd, select.POLLIN)
    begin, status = time.monotonic(), None
    next_look = begin + POLL_SECONDS
    on_disk = True
    while names and status is None:
        for fd, _ in poll.poll(POLL_SECONDS * 1000):
            chunk = os.read(fd, 1 << 16)
            output[names[fd]] += chunk
            if not chunk:
                poll.unregister(fd)
                if names.pop(fd) == "status":  # the child has ended, whoever still holds the other pipes
                    names.clear()
                    break
        if b"\n" in output["status"]:
            first = json.loads(output["status"].splitlines()[0])
            on_disk = "filesystem" in first["missing"]
        if len(output["stdout"]) + len(output["stderr"]) > settings["max_output"]:
            status = "output"
        now = time.monotonic()
        if now - begin > settings["wall_seconds"]:
            status = "timeout"
        elif now >= next_look:
            next_look = now + POLL_SECONDS
            below = descendants(pid)[1:]
            if resident_mb(below) > settings["memory_mb"]:
                status = "memory"
            elif on_disk and too_many_files(root, settings):
                status = "files"
    return {"stopped_for": status, "seconds": time.monotonic() - begin, **output}


def end(pid: int, kept: set[str], uid: int | None) -> None:
    """Kills the child and all that came of it."""
    for _ in range(100):
        for each in descendants(os.getpid())[1:]:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if "processes" not in kept and uid is not None and os.geteuid() == 0:
            sweeper = os.fork()
            if sweeper == 0:
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)  # every process of this user but the caller
                os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.umask(0o022)
    root = Path(tempfile.mkdtemp(prefix="sandbox-"))
    kept, uid = leave_namespaces(settings)
    ends = {name: os.pipe() for name in ("status", "stdout", "stderr")}
    pid = os.fork()
    if pid == 0:
        for reader, _ in ends.values():
            os.close(reader)
        child(settings, kept, uid, root, {name: writer for name, (_, writer) in ends.items()})
    for _, writer in ends.values():
        os.close(writer)
    try:
        seen = watch(settings, pid, root, {name: reader for name, (reader, _) in ends.items()})
    finally:
        end(pid, kept, uid)
        shutil.rmtree(root, ignore_errors=True)
    result: dict[str, Any] = {"missing": ["user", "network", "processes", "filesystem"], "reason": "", "exit": None}
    for line in seen.pop("status").splitlines():
        result |= json.loads(line)
    limit = settings["max_output"]  # kept of each stream
    streams = {name: seen.pop(name)[:limit].decode("utf-8", "replace") for name in ("stdout", "stderr")}
    return result | seen | streams


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
