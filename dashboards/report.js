// A chart in a narrow window: its panels below each other and no wider than there is room.
function fit(spec, width) {
  const AXES = 90;
  const view = spec.spec ?? spec;
  if (typeof view.width !== "number" || width >= view.width + AXES + (spec.spec ? view.width : 0)) return;
  if (spec.spec) spec.columns = 1;
  view.width = Math.max(160, Math.min(view.width, width - AXES));
  spec.config.legend.columns = 2;
}

// Figures become interactive where scripts run; without them the SVG that is already there stays.
for (const chart of document.querySelectorAll(".drawing")) {
  const spec = JSON.parse(document.getElementById(chart.dataset.spec).textContent);
  fit(spec, chart.closest(".figures").clientWidth - 20); // less what frames it
  const live = document.createElement("div");
  // The chart's label and table say it better than a walk through its marks.
  live.ariaHidden = "true";
  window.vegaEmbed(live, spec, { actions: false, renderer: "svg" })
    .then(() => chart.replaceChildren(live))
    .catch((error) => console.error(chart.dataset.spec, error));
}

// Headings sort their column; numbers sort by data-value, text as people read it.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const rising = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const compare = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
      const number = (row) => (Number.isNaN(Number(key(row))) ? -Number.MAX_VALUE : Number(key(row)));
      const byNumber = (a, b) => number(a) - number(b);
      const numeric = [...body.rows].every((row) => row.cells[column].dataset.value !== undefined);
      const rows = [...body.rows].sort(numeric ? byNumber : compare);
      body.replaceChildren(...(rising ? rows : rows.reverse()));
    });
  });
}
