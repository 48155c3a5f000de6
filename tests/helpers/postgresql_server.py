"""A temporary PostgreSQL server on the loopback interface."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import free_port

USER = "parnas"


class Server:
    """Data in a folder of its own; runs as another user where the tests run as root, which PostgreSQL refuses to."""

    def __init__(self, binaries: Path) -> None:
        self.binaries, self.port = binaries, free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="parnas-postgresql-"))
        self.owner: dict[str, object] = {}
        if os.geteuid() == 0:
            user = find_user()
            self.owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        initdb = [
            binaries / "initdb",
            "-D",
            "data",
            "-U",
            USER,
            "--auth=trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        ]
        subprocess.run(initdb, cwd=self.folder, check=True, capture_output=True, **self.owner)
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = ["-h", "127.0.0.1", "-p", str(self.port), "-k", "", "-F"]
        with (self.folder / "log").open("ab") as log:
            command = [self.binaries / "postgres", "-D", "data", *settings]
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self.owner)
        for _ in range(300):
            try:
                self.execute("SELECT 1")
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        """Close all connections and stop, as `pg_ctl stop -m fast` does."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def remove(self) -> None:
        """Stop it and wait until the process has ended."""
        self.stop()
        shutil.rmtree(self.folder)

    def execute(self, statement: str) -> None:
        """Run a statement in the database `postgres`; raises `OSError` if no server answers."""
        import psycopg

        try:
            with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
                connection.execute(statement)
        except psycopg.OperationalError as error:
            raise OSError(str(error)) from error

    def address(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"


def find_user() -> pwd.struct_passwd:
    """Return the user that PostgreSQL runs as instead of root."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


def find_binaries() -> Path:
    """The folder of `initdb` and `postgres`: Debian's newest, or one of PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    for folder in [*debian, *map(Path, os.get_exec_path())]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("PostgreSQL is not installed; on Debian: apt-get install postgresql")
