"""A cloud's notice that it is about to take this machine away: it counts as a signal to save and leave.

Clouds answer a machine's questions about itself at addresses that only the machine can reach. A thread finds out which
cloud this is, asks every five seconds, and ends at once where it is none.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
Google: https://cloud.google.com/compute/docs/instances/create-use-spot
Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
Alibaba: https://www.alibabacloud.com/help/ecs/user-guide/query-the-interruption-events-of-preemptible-instances
"""

import contextlib
import http.client
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

# seconds
POLL = 5.0  # from one question to the next, as AWS advises
ANSWER = 2.0  # for an answer
DETECTION = 1.0  # for an answer from a cloud that may not be here
FIRST_EVENTS = 150.0  # Azure's first answer about events may take two minutes
SILENT = 60.0  # without an answer, until the user hears of it
TOKEN_TTL = 21600  # the longest that AWS and Alibaba allow

LARGEST = 2**16  # bytes of an answer that are read
DMI = Path("/sys/class/dmi/id")  # who made the machine, also inside a container
MAKERS = {  # by what stands in one of these files
    "Amazon EC2": "aws",
    "Google Compute Engine": "gcp",
    "7783-7084-3265-9085-8269-3286-77": "azure",
    "Alibaba Cloud": "alibaba",
}


class Answer(NamedTuple):
    status: int
    text: str
    headers: Message


class Notice(NamedTuple):
    """`stops`: the machine goes; else it is advice to save."""

    stops: bool
    text: str


class Cloud:
    """Attributes: `lead`, the seconds from a notice to the end that the cloud promises."""

    name = ""
    lead = 0.0
    host = "169.254.169.254"  # Google's name for it would have to be looked up, which may hang

    def ask(self, path: str, headers: dict[str, str], method: str = "GET", timeout: float = ANSWER) -> Answer:
        """Without any proxy, whatever the environment says: a proxy would answer for its own machine.

        Raises:
            OSError, http.client.HTTPException: no answer.
        """
        connection = http.client.HTTPConnection(self.host, timeout=timeout)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(LARGEST).decode("utf-8", "replace"), answer.headers)
        finally:
            connection.close()

    def is_here(self) -> bool:
        """Raises OSError or http.client.HTTPException: no answer."""
        raise NotImplementedError

    def poll(self) -> Notice | None:
        """Raises OSError or http.client.HTTPException: no answer, or none that means anything."""
        raise NotImplementedError

    def found(self, answer: Answer) -> str | None:
        """The text of an answer; None where there is nothing under the path.

        Raises:
            OSError: an error of the service.
        """
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return answer.text

    def silence(self) -> str:
        return f"{self.name} does not answer at {self.host}: its notice will not be seen"


class _WithToken(Cloud):
    """Clouds that ask for a token first."""

    header = ""  # without -ttl-seconds

    def __init__(self) -> None:
        self.token: str | None = None
        self.token_until = 0.0

    def renew(self, timeout: float = ANSWER) -> bool:
        self.token, self.token_until = None, time.monotonic() + TOKEN_TTL / 2
        answer = self.ask("/latest/api/token", {f"{self.header}-ttl-seconds": str(TOKEN_TTL)}, "PUT", timeout)
        if answer.status == 200 and re.fullmatch(r"[\w+/=-]{16,}", answer.text, re.ASCII):
            self.token = answer.text
        return self.token is not None

    def is_here(self) -> bool:
        return self.renew(DETECTION)

    def get(self, path: str) -> str | None:
        if self.token is None or time.monotonic() > self.token_until:
            self._try_to_renew()
        answer = self._get(path)
        if answer.status == 401:
            self._try_to_renew()
            answer = self._get(path)
        return self.found(answer)

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except (OSError, http.client.HTTPException):
            self.token_until = 0.0  # some machines answer without one

    def _get(self, path: str) -> Answer:
        return self.ask(path, {self.header: self.token} if self.token else {})


class Aws(_WithToken):
    name, lead, header = "AWS", 120.0, "X-aws-ec2-metadata-token"

    def poll(self) -> Notice | None:
        action = content(self.get("/latest/meta-data/spot/instance-action"))
        if action.get("action") in ("terminate", "stop", "hibernate"):
            return Notice(True, f"AWS's notice to {action['action']} at {word(action.get('time'))}")
        advice = content(self.get("/latest/meta-data/events/recommendations/rebalance"))
        if "noticeTime" in advice:
            return Notice(False, f"AWS's advice of {word(advice['noticeTime'])} to rebalance")
        return None

    def silence(self) -> str:
        return (
            f"AWS does not answer at {self.host}, its notice will not be seen: from inside a container that takes "
            "--network host, or aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2"
        )


class Google(Cloud):
    name, lead = "Google", 30.0

    def _preempted(self, timeout: float) -> Answer:
        return self.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}, timeout=timeout)

    def is_here(self) -> bool:
        return self._preempted(DETECTION).headers.get("Metadata-Flavor") == "Google"

    def poll(self) -> Notice | None:
        text = self.found(self._preempted(ANSWER))
        return Notice(True, "Google's notice of preemption") if (text or "").strip().upper() == "TRUE" else None


class Azure(Cloud):
    name, lead = "Azure", 30.0

    def __init__(self) -> None:
        self.machine: str | None = None
        self.asked = False

    def is_here(self) -> bool:
        answer = self.ask("/metadata/instance?api-version=2021-02-01", {"Metadata": "true"}, timeout=DETECTION)
        compute = content(answer.text).get("compute") if answer.status == 200 else None
        if isinstance(compute, dict):
            self.machine = compute.get("name")
        return isinstance(compute, dict)

    def poll(self) -> Notice | None:
        timeout = ANSWER if self.asked else FIRST_EVENTS
        self.asked = True
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        events = content(self.found(self.ask(path, {"Metadata": "true"}, timeout=timeout))).get("Events")
        for event in events if isinstance(events, list) else []:
            # the machines of a scale set hear of one another's
            if isinstance(event, dict) and event.get("EventType") in ("Preempt", "Terminate"):
                machines = event.get("Resources")
                if not machines or self.machine is None or self.machine in machines:
                    return Notice(
                        True, f"Azure's notice to {event['EventType'].lower()} at {word(event.get('NotBefore'))}"
                    )
        return None


class Alibaba(_WithToken):
    name, lead, header = "Alibaba", 300.0, "X-aliyun-ecs-metadata-token"
    host = "100.100.100.200"

    def poll(self) -> Notice | None:
        text = (self.get("/latest/meta-data/instance/spot/termination-time") or "").strip()
        try:
            datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
        except ValueError:
            return None
        return Notice(True, f"Alibaba's notice to release at {text}")


CLOUDS: dict[str, type[Cloud]] = {"aws": Aws, "gcp": Google, "azure": Azure, "alibaba": Alibaba}


def content(text: str | None) -> dict[str, Any]:
    """Of a JSON object; empty for anything else."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def word(value: Any) -> str:
    """What came over the network, fit for a terminal."""
    return re.sub(r"[^\w:.+, -]", "", str(value))[:40]


def detect() -> Cloud | None:
    """The cloud that this machine is of: all are asked at once, and the first that knows itself is it."""
    answers: queue.SimpleQueue[Cloud | None] = queue.SimpleQueue()

    def ask(cloud: Cloud) -> None:
        here = False
        with contextlib.suppress(Exception):  # whatever may come over a network
            here = cloud.is_here()
        answers.put(cloud if here else None)

    for cloud in CLOUDS.values():
        threading.Thread(target=ask, args=[cloud()], daemon=True).start()
    deadline = time.monotonic() + 1.5 * DETECTION
    with contextlib.suppress(queue.Empty):
        for _ in CLOUDS:
            if found := answers.get(timeout=max(0.0, deadline - time.monotonic())):
                return found
    return None


def maker() -> str | None:
    """The cloud that made this machine, though it may not answer: a key of `CLOUDS`."""
    written = ""
    for name in ("sys_vendor", "product_name", "chassis_asset_tag"):
        with contextlib.suppress(OSError):
            written += (DMI / name).read_text()
    return next((cloud for words, cloud in MAKERS.items() if words in written), None)


class SpotWatch:
    """Watches for the notice for the time of a `with` block.

    Args:
        name: `auto`, `off`, or a key of `CLOUDS`.
        signals: told of the notice by `ask`, of advice by `advise`, of the cloud's lead time by `lead`.
        say: called with lines for the user, from a thread.
    """

    def __init__(self, name: str, signals: Any, say: Callable[[str], None]) -> None:
        self.name, self.signals, self.say = name, signals, say
        self._leave = threading.Event()

    def __enter__(self) -> "SpotWatch":
        if self.name != "off":
            threading.Thread(target=self._watch, name="spot-watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()

    def _watch(self) -> None:
        cloud = self._find()
        if cloud is None:
            return
        self.signals.lead = cloud.lead
        advice, answered, silent = None, time.monotonic(), False
        while not self._leave.is_set():
            began = time.monotonic()
            try:
                notice = cloud.poll()
                answered = time.monotonic()
                if silent:
                    self.say(f"{cloud.name} answers again")
                    silent = False
            except Exception:  # whatever may come over a network
                notice = None
                if not silent and time.monotonic() - answered > SILENT:
                    self.say(cloud.silence())
                    silent = True
            if notice and notice.stops:
                self.signals.ask(notice.text)
                return
            if notice and notice.text != advice:
                advice = notice.text
                self.say(f"{advice}: a checkpoint is made, training goes on")
                self.signals.advise()
            self._leave.wait(max(0.0, began + POLL - time.monotonic()))

    def _find(self) -> Cloud | None:
        if self.name == "auto":
            if (cloud := detect()) or not (name := maker()):
                return cloud
            cloud = CLOUDS[name]()
        else:
            cloud = CLOUDS[self.name]()
        try:
            here = cloud.is_here()
        except Exception:  # whatever may come over a network
            here = False
        if not here:
            self.say(cloud.silence())
        return cloud
