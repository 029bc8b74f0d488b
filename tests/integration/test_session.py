"""A run's own Ray session is nobody else's."""

import json
import subprocess
import sys
from ipaddress import ip_address

SCRIPT = """
import json, psutil
from dapo_megatron.cluster.session import ray_session
import ray
with ray_session(hide_gpus=True):
    ray.get(ray.remote(num_cpus=0)(lambda: None).remote())  # a worker listens too
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [(p.name(), c.laddr.ip) for p in processes for c in p.net_connections(kind="inet") if c.status == "LISTEN"]
    tokens = [p.environ()["RAY_AUTH_TOKEN"] for p in processes if p.name() in ("gcs_server", "raylet")]
print(json.dumps([found, tokens]))
"""


def test_it_listens_on_loopback_only_and_wants_a_token_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    listening, tokens = json.loads(done.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    addresses = [ip_address(address) for _, address in listening]
    assert all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in addresses), listening
    assert len(tokens) == 2 and len(set(tokens)) == 1 and len(tokens[0]) == 64
