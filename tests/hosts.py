"""Two hosts on one machine: namespaces for network, processes and mounts, a boot id and a /dev/shm each, a cable between."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import HERE, child_environment

PORT = 18786
# A host sees its own processes and shared memory only, and says of itself that it was booted by itself.
ENTER = "mount --bind {boot} /proc/sys/kernel/random/boot_id && mount -t tmpfs none /dev/shm && exec {command}"


class Host:
    """A host by name and address; its processes are killed together."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.boot = folder / f"{name}.boot"
        self.boot.write_text(f"{name}\n", encoding="ascii")
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, env: dict[str, str], module: str, *arguments: str, talks: bool = False) -> subprocess.Popen[bytes]:
        """Run a Python module there; `talks` keeps its standard streams."""
        command = " ".join([sys.executable, "-m", module, *arguments])
        line = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = ENTER.format(boot=self.boot, command=command)
        stream = subprocess.PIPE if talks else subprocess.DEVNULL
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *line, "sh", "-c", inside],
            env=env, cwd=HERE, start_new_session=True, **dict.fromkeys(("stdin", "stdout", "stderr"), stream),
        )  # fmt: skip
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.processes.clear()


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"dm-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are refused here: {tried.stderr.strip()}"
    inside = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    entered = subprocess.run(["ip", "netns", "exec", name, *inside], capture_output=True, text=True, check=False)
    _ip("netns", "del", name)
    return f"mount namespaces are refused here: {entered.stderr.strip()}" if entered.returncode else ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    tag = f"{os.getpid() % 100_000}"
    names, cables = [f"dm-{tag}{side}" for side in "ab"], [f"dmc{tag}{side}" for side in "ab"]
    hosts = [Host(name, f"10.231.77.{i + 1}", folder) for i, name in enumerate(names)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            _ip("link", "set", cable, "netns", host.name)
            for line in (f"addr add {host.address}/24 dev {cable}", f"link set {cable} up", "link set lo up"):
                _ip("-n", host.name, *line.split())
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.stop()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def tls_environment(folder: Path, addresses: list[str]) -> dict[str, str]:
    """A certificate for these addresses, which signs itself, and the settings with which Dask uses it for everything."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "daskmesh tests")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    traditional = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, traditional, plain))
    prefix = "DASK_DISTRIBUTED__COMM__"
    found = {f"{prefix}TLS__CA_FILE": str(folder / "cert.pem"), f"{prefix}REQUIRE_ENCRYPTION": "True"}
    for who in ("SCHEDULER", "WORKER", "CLIENT"):
        found[f"{prefix}TLS__{who}__CERT"] = str(folder / "cert.pem")
        found[f"{prefix}TLS__{who}__KEY"] = str(folder / "key.pem")
    return found


def environment(folder: Path, hosts: tuple[Host, Host], *, tls: bool) -> dict[str, str]:
    """For every process of the cluster."""
    extra = tls_environment(folder, [host.address for host in hosts]) if tls else {}
    return child_environment(DASK_DASKMESH__GRACE="1h", PYTHONWARNINGS="ignore", **extra)
