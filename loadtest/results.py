"""Shows the result of a load test: in locust's web page, in its HTML report, at the end of the output (the last line is
JSON), and as the exit status. Runs only in the process that owns the result.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, jsonify, request

from loadtest import report
from loadtest.session import Owner

_KEY = "looseleaf"
_CHARTS = """<style>body.looseleaf #root > * { min-height: 0 !important }</style>
<div id="looseleaf-charts" hidden></div>
<script>
let seen = 0;
setInterval(async () => {
  const charts = document.getElementById("looseleaf-charts");
  charts.hidden = new URLSearchParams(location.search).get("tab") !== "looseleaf";
  document.body.classList.toggle("looseleaf", !charts.hidden);
  if (charts.hidden || document.hidden || Date.now() - seen < 2000) return;
  seen = Date.now();
  const reply = await fetch("./looseleaf/charts");
  if (reply.ok) charts.innerHTML = await reply.text();
}, 250);
</script>"""
"""HTML that shows our section when our tab, which is otherwise empty, is selected. Locust's page has no place for
charts of others.
"""


class Results:
    """The result of the run so far."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._slo = owner.settings.slo
        self._began_s = time.time()

    def figures(self, *, at_end: bool = False) -> dict[str, Any]:
        return report.figures(self._owner.record, self._slo, self._owner.unsent if at_end else 0)

    def data(self) -> dict[str, Any]:
        """Returns the figures and the lines of the charts."""
        return {**self.figures(), "series": report.series(self._owner.record, self._slo)}

    def html(self, *, at_end: bool = False) -> str:
        return report.html(self.figures(at_end=at_end), self._owner.record, self._slo)

    def end(self, environment: Any, **_: Any) -> None:
        """Sets the exit status, completes the HTML report, and prints the result after locust's own tables."""
        environment.runner.stop()  # Ctrl-C does not stop a run in one process
        found = self.figures(at_end=True)
        if found["unsent"]:
            environment.process_exit_code = 1
        elif self._slo.limits and not environment.runner.exceptions:  # a failed request has missed the limits
            environment.process_exit_code = int(not report.slo_met(found))
        name = environment.parsed_options.html_file
        if name and Path(name).is_file() and Path(name).stat().st_mtime >= self._began_s:
            page = Path(name).read_text(encoding="utf-8")
            Path(name).write_text(_with_section(page, self.html(at_end=True)), encoding="utf-8")
        environment.events.quit.add_listener(
            lambda **_: print(f"{report.text(found)}\n{json.dumps(found)}", flush=True)
        )


def publish(owner: Owner, web_ui: Any) -> None:
    """Adds the result to the end of the run, and to the web page if there is one."""
    results = Results(owner)
    owner.environment.events.quitting.add_listener(results.end)
    if web_ui is not None:
        _extend(web_ui, results, owner.environment.parsed_options.web_base_path)


def _extend(web_ui: Any, results: Results, base: str) -> None:
    """Adds a tab with our table and charts to locust's page, and adds both to the report that the page offers."""
    routes = Blueprint(_KEY, __name__, url_prefix=f"{base}/looseleaf")

    @routes.route("/charts")
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def charts() -> str:
        return results.html()

    @routes.route("/stats")
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def stats() -> Response:
        return jsonify(results.data())

    web_ui.app.register_blueprint(routes)
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": _KEY}],
        "extended_csv_files": [{"href": "./looseleaf/stats", "title": "Download token figures (JSON)"}],
    }

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def extend(response: Response) -> Response:
        path = request.path.removeprefix(base)
        if response.status_code != 200:
            return response
        if path == "/" and request.endpoint == "locust.index":
            response.set_data(_with_section(response.get_data(as_text=True), _CHARTS))
        elif path == "/stats/report":
            response.set_data(_with_section(response.get_data(as_text=True), results.html()))
        return response


def _with_section(page: str, section: str) -> str:
    """Returns the page with a section at the end of its body."""
    before, body, after = page.rpartition("</body>")
    return f"{before}{section}{body}{after}"
