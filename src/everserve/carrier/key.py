"""The cluster key: one file that lets hosts into an instance. A host that has it may join; no other one is answered.

It holds a private key and its certificate, which both ends of a link show and both check, in TLS 1.3. `everserve serve`
makes the file if there is none; its owner copies it to the other hosts.
"""

import os
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

from everserve.errors import ConfigError

_DAYS = 3650
_MODE = 0o600


def make_if_missing(path: Path) -> None:
    """Raises ConfigError if there is none and none can be made."""
    if path.exists():
        return
    if shutil.which("openssl") is None:
        raise ConfigError(
            f"--cluster-key {path}: there is no such file, and no `openssl` to make it with: install that"
        )
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            key, certificate = Path(directory, "key"), Path(directory, "certificate")
            _openssl(str(key), str(certificate))
            whole = Path(directory, "whole")
            with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb") as file:
                file.write(key.read_bytes() + certificate.read_bytes())
            os.link(whole, path)  # whole, or not there; and never in place of another one's
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"--cluster-key {path}: cannot be written ({error.strerror})") from None


def _openssl(key: str, certificate: str) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    out = ["-keyout", key, "-out", certificate, "-days", str(_DAYS), "-subj", "/CN=everserve"]
    made = subprocess.run(["openssl", "req", "-x509", "-nodes", *curve, *out], capture_output=True, check=False)
    if made.returncode:
        raise ConfigError(f"openssl cannot make a key: {made.stderr.decode(errors='replace').strip()[-200:]}")


def context(path: str | Path, is_server: bool) -> ssl.SSLContext:
    """For one end of a link. Raises ConfigError if the file is not a cluster key, or others can read it."""
    file = Path(path)
    try:
        mode = file.stat().st_mode & 0o777
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        found.check_hostname = False  # the key makes a host one of the instance, under any name
        found.verify_mode = ssl.CERT_REQUIRED
        found.load_cert_chain(file)
        found.load_verify_locations(file)
    except FileNotFoundError:
        raise ConfigError(f"--cluster-key {file}: there is no such file; copy it from the first host") from None
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--cluster-key {file}: not a cluster key of `everserve serve` ({error})") from None
    if mode & 0o077:
        raise ConfigError(f"--cluster-key {file}: others can read it: chmod 600 {file}")
    return found
