"""A real Kubernetes API for tests: etcd and kube-apiserver on loopback, without kubelets.

The behaviour of CRDs, CEL, RBAC and admission is tested against the real server, never against a fake. The
binaries are those of the test bed; where one is missing, the test fails with a message that names how to
build it.
"""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.hang import HANG_SECONDS
from tests.support.servers.pki import Authority
from tests.support.servers.ports import free_port
from tests.support.servers.settings import find_tool, testbed_dir

from holdfast_core.errors import ConfigError, HoldfastError

_READY_WITHIN_SECONDS = HANG_SECONDS


class ControlPlaneError(HoldfastError):
    """etcd or kube-apiserver did not start, or kubectl or a request failed.

    The message holds the end of the log, or the error output.
    """


def find_binary(name: str) -> Path:
    """Return the path of a tool of the test bed.

    Raises ConfigError with a remedy if the tool is not built.
    """
    path = find_tool(name)
    if path is None:
        raise ConfigError(
            f"{name} is neither on PATH nor in {testbed_dir() / 'bin'}: run `make cluster-up`, "
            "which builds the test bed's tools (HOLDFAST_TESTBED_DIR says where they are)"
        )
    return path


class ControlPlane:
    """etcd and kube-apiserver with RBAC, as `with ControlPlane() as cp:`.

    No controller manager runs. There is no garbage collection, a service account has only the tokens that
    TokenRequest issues, and pods are only records. `create_namespace` creates a namespace with its
    `default` service account. The servers listen on free loopback ports and keep all files in a temporary
    folder.
    """

    def __init__(
        self, *, keep_logs_in: Path | None = None, extra_args: tuple[str, ...] = ()
    ) -> None:
        self._token = secrets.token_hex(16)
        self._extra_args = extra_args
        self._keep_logs_in = keep_logs_in
        self._stack = ExitStack()
        self._api: subprocess.Popen[bytes] | None = None
        self._etcd: subprocess.Popen[bytes] | None = None
        self.dir = Path()
        self.kubeconfig = Path()
        self.url = ""

    def __enter__(self) -> Self:
        etcd, apiserver = find_binary("etcd"), find_binary("kube-apiserver")
        with ExitStack() as stack:
            self.dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-cp-")))
            if self._keep_logs_in is not None:
                stack.callback(self._copy_logs, self._keep_logs_in)
            self._write_certificates()
            client, peer, port = (free_port() for _ in range(3))
            self.url = f"https://127.0.0.1:{port}"
            self._etcd_url = f"http://127.0.0.1:{client}"
            self._apiserver = apiserver
            self._port = port
            self._start_etcd = self._etcd_command(etcd, self._etcd_url, peer)
            self._etcd = self._spawn(stack, "etcd", self._start_etcd)
            self._write_kubeconfig()
            self._stack = stack
            self.start_api()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _write_certificates(self) -> None:
        """Write ca.crt, server.crt and server.key, which are valid for a day.

        The key is RSA, so that it can also sign the tokens of service accounts.
        """
        day = timedelta(days=1)
        authority = Authority(lifetime=day)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        certificate, key_pem = authority.leaf("localhost", "127.0.0.1", lifetime=day, key=key)
        (self.dir / "ca.crt").write_bytes(authority.certificate_pem)
        (self.dir / "server.crt").write_bytes(certificate)
        (self.dir / "server.key").write_bytes(key_pem)

    def start_api(self) -> None:
        """Start kube-apiserver (again, after `kill_api`) and wait until it is ready."""
        command = self._api_command()
        self._api = self._spawn(self._stack, "kube-apiserver", command)
        deadline = time.monotonic() + _READY_WITHIN_SECONDS
        while True:
            if self._api.poll() is not None:
                raise ControlPlaneError(f"kube-apiserver ended: {self._log_tail('kube-apiserver')}")
            try:
                self.request("GET", "/readyz")
                break
            except (OSError, ControlPlaneError) as error:
                if time.monotonic() > deadline:
                    raise ControlPlaneError(
                        f"kube-apiserver at {self.url} not ready within {_READY_WITHIN_SECONDS} s: "
                        f"{error}; log: {self._log_tail('kube-apiserver')}"
                    ) from error
            time.sleep(0.1)

    def kill_api(self) -> None:
        """Send SIGKILL to kube-apiserver. etcd keeps running with its data."""
        assert self._api is not None
        self._api.kill()
        self._api.wait()

    def freeze_api(self) -> None:
        """Stop kube-apiserver with SIGSTOP: it accepts connections, and answers nothing."""
        assert self._api is not None
        self._api.send_signal(signal.SIGSTOP)

    def thaw_api(self) -> None:
        assert self._api is not None
        self._api.send_signal(signal.SIGCONT)

    def freeze_etcd(self) -> None:
        """Stop etcd with SIGSTOP: kube-apiserver answers with errors, after its own time-outs."""
        assert self._etcd is not None
        self._etcd.send_signal(signal.SIGSTOP)

    def thaw_etcd(self) -> None:
        assert self._etcd is not None
        self._etcd.send_signal(signal.SIGCONT)

    def copy_state(self, folder: Path) -> None:
        """Copy all data of the API to the folder. Both servers stop for it, and run again afterwards."""
        with self._stopped() as data:
            shutil.copytree(data, folder)

    def restore_state(self, folder: Path) -> None:
        """Replace all data of the API by a copy, as when etcd is restored: resourceVersions go back."""
        with self._stopped() as data:
            shutil.rmtree(data)
            shutil.copytree(folder, data)

    @contextmanager
    def _stopped(self) -> Iterator[Path]:
        """Stop both servers, and start them again at the end. Yields the folder of etcd's data."""
        self.kill_api()
        assert self._etcd is not None
        self._etcd.kill()
        self._etcd.wait()
        yield self.dir / "etcd"
        self._etcd = self._spawn(self._stack, "etcd", self._start_etcd)
        self.start_api()

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl with this cluster's kubeconfig and return its stdout.

        Raises ControlPlaneError with stderr if kubectl fails. With `check=False` it returns stdout and
        stderr together instead.
        """
        done = subprocess.run(
            [str(find_binary("kubectl")), f"--kubeconfig={self.kubeconfig}", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            env={"HOME": str(self.dir), "PATH": "/usr/bin:/bin"},
        )
        if not check:
            return done.stdout + done.stderr
        if done.returncode != 0:
            raise ControlPlaneError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> str:
        """Run `kubectl apply` for the objects and return its stdout."""
        return self.kubectl("apply", "-f", "-", stdin=_as_list(objects))

    def create_namespace(self, name: str, **labels: str) -> None:
        """Create a namespace and its default service account, which no controller creates here."""
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name, "labels": dict(labels)},
            },
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": name},
            },
        )

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call the API as administrator and return the decoded JSON, or the text of another reply.

        Raises ControlPlaneError with the server's message on an HTTP error.
        """
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        context = ssl.create_default_context(cafile=str(self.dir / "ca.crt"))
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS, context=context) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise ControlPlaneError(f"{method} {path}: HTTP {error.code}: {answer}") from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def _etcd_command(self, binary: Path, client_url: str, peer: int) -> list[str]:
        peer_url = f"http://127.0.0.1:{peer}"
        return [
            str(binary),
            f"--data-dir={self.dir / 'etcd'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_command(self) -> list[str]:
        return [
            str(self._apiserver),
            f"--etcd-servers={self._etcd_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.dir}",
            f"--tls-cert-file={self.dir / 'server.crt'}",
            f"--tls-private-key-file={self.dir / 'server.key'}",
            f"--token-auth-file={self.dir / 'tokens.csv'}",
            f"--service-account-key-file={self.dir / 'server.key'}",
            f"--service-account-signing-key-file={self.dir / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",  # as kubeadm sets it; Pod Security decides
            "--enable-priority-and-fairness=false",
            *self._extra_args,
        ]

    def _spawn(self, stack: ExitStack, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.dir / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        stack.callback(_end, process)
        return process

    def _write_kubeconfig(self) -> None:
        (self.dir / "tokens.csv").write_text(f'{self._token},admin,admin,"system:masters"\n')
        self.kubeconfig = self.dir / "kubeconfig"
        self._write_config(self.kubeconfig, self._token)

    def write_kubeconfig_of(self, namespace: str, account: str, path: Path) -> None:
        """Write a kubeconfig with a token of this service account, which is valid for a day."""
        url = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 24 * 3600},
        }
        self._write_config(path, str(self.request("POST", url, body)["status"]["token"]))

    def _write_config(self, path: Path, token: str) -> None:
        authority = base64.b64encode((self.dir / "ca.crt").read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority-data": authority},
                }
            ],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        }
        path.write_text(json.dumps(config))

    def _log_tail(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text(errors="replace")[-2000:]

    def _copy_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for log in self.dir.glob("*.log"):
            shutil.copy(log, folder / log.name)


def _as_list(objects: tuple[Mapping[str, Any], ...]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process. The control plane of a test needs no orderly shutdown."""
    process.kill()
    process.wait()
