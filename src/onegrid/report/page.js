"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const line = (i) => (i < 0 ? color("rest") : color("c" + (i % 8)));
  // Plotly reads a few tags in labels; names of runs are text.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const fade = (hex, share) => {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${share})`;
  };

  // All charts over steps share one range, so that the eye can go down the page.
  const steps = data.charts.flatMap((c) => [...(c.x || []), ...(c.series || []).flatMap((s) => s.x || [])]);
  const first = steps.reduce((a, b) => Math.min(a, b), Infinity), last = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  const pad = Math.max(0.5, (last - first) * 0.02);

  function traces(chart) {
    if (chart.kind === "heat") {
      const logs = chart.z.map((row) => row.map((v) => (v > 0 ? Math.log10(v) : null)));
      const all = logs.flat().filter((v) => v !== null);
      const low = Math.floor(Math.min(...all)), high = Math.ceil(Math.max(...all));
      const ticks = Array.from({ length: high - low + 1 }, (_, i) => low + i);
      return [{
        type: "heatmap", x: chart.x, y: chart.y.map(plain), z: logs, customdata: chart.z, colorscale: "Cividis",
        hovertemplate: "%{y}, step %{x}<br>norm %{customdata:.4g}<extra></extra>", hoverongaps: false,
        colorbar: {
          thickness: 10, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((t) => (10 ** t).toPrecision(1)),
          tickfont: { color: color("muted"), size: 11 }, title: { text: "" },
        },
      }];
    }
    if (chart.kind === "stack") {
      return chart.series.map((s) => ({
        type: "bar", name: plain(s.name), x: chart.x, y: s.y, meta: s.key, marker: { color: fade(line(s.color), 0.8) },
        hovertemplate: "%{y:.4~g} s",
      }));
    }
    return chart.series.map((s) => ({
      type: "scatter",
      name: plain(s.name),
      x: s.x || chart.x,
      y: s.y,
      mode: s.points ? "markers" : s.y.length === 1 ? "markers" : "lines",
      meta: s.key,
      showlegend: !s.points || data.runs.length === 1 || chart.series.every((t) => t.points),
      line: { color: line(s.color), width: s.faint ? 1 : 1.8 },
      opacity: s.faint ? 0.45 : 1,
      ...(chart.band && chart.band.includes(s.key)
        ? { line: { width: 0, color: line(0) }, showlegend: false, fillcolor: fade(line(0), 0.16), fill: s.key === chart.band[1] ? "tonexty" : "none" }
        : {}),
      marker: { color: line(s.color), size: s.points ? 9 : 7, symbol: s.points ? "diamond" : "circle" },
      ...(s.points
        ? { error_y: { type: "data", symmetric: false, array: s.above, arrayminus: s.below, color: line(s.color), thickness: 1.5, width: 5 } }
        : {}),
      hovertemplate: "%{y:.6~g}",
    }));
  }

  function layout(chart) {
    const muted = color("muted"), grid = color("line");
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { color: muted, size: 11.5 }, automargin: true, fixedrange: false };
    const y = { ...axis, rangemode: chart.from_zero ? "tozero" : "normal", exponentformat: chart.unit === "bytes" ? "SI" : "power", showexponent: "all", nticks: 6 };
    const shapes = [], annotations = [];
    const values = (chart.series || []).flatMap((s) => s.y);
    if (chart.zero) {
      y.zeroline = true;
      y.zerolinecolor = color("ink");
      y.zerolinewidth = 1;
      if (values.every((v) => v === 0)) {
        y.range = [-1e-6, 1e-6];
        annotations.push({
          text: "0 in every step",
          xref: "paper", yref: "paper", x: 0.5, y: 0.8, showarrow: false, font: { color: muted, size: 11.5 },
        });
      }
    }
    if (chart.top !== undefined && values.every((v) => v === chart.top)) y.range = [0, chart.top * 1.08];
    if (chart.kind === "heat") { y.type = "category"; y.nticks = 16; }
    const many = chart.kind === "lines" && chart.series.length > 1;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 12 },
      margin: { l: 48, r: 12, t: 10, b: 34 },
      xaxis: { ...axis, title: { text: "step", font: { color: muted, size: 11.5 }, standoff: 6 }, zeroline: false, nticks: 7, range: [first - pad, last + pad] },
      barmode: "stack", bargap: 0.12,
      yaxis: y,
      shapes, annotations,
      showlegend: many || chart.kind === "stack",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: muted, size: 11.5 }, bgcolor: "rgba(0,0,0,0)" },
      hovermode: chart.kind === "heat" ? "closest" : "x unified",
      hoverlabel: { bgcolor: color("card"), bordercolor: grid, font: { color: color("ink"), size: 12 } },
      dragmode: "zoom",
    };
  }

  function draw() {
    for (const chart of data.charts) {
      const element = document.getElementById("chart-" + chart.id);
      if (element) Plotly.react(element, traces(chart), layout(chart), { displayModeBar: false, responsive: true });
    }
  }

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  root.dataset.drawn = "yes";
})();
