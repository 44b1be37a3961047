"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Each legible on white and on near-black; the dashes tell variants apart without colour.
  const COLOURS = ["#7c8591", "#2f81f7", "#d9730d", "#0f9d6b", "#a855f7", "#db2777", "#0e96a3"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
  const PRINT_SIZE = {autosize: false, width: 660, height: 272};  // page.css has the same height
  const arms = data.arms;
  const style = (arm) => Math.max(0, arms.indexOf(arm)) % COLOURS.length;
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  let printing = false;

  function trace(entry) {
    const number = style(entry.arm);
    const colour = COLOURS[number];
    const common = {x: entry.x, y: entry.y, name: entry.name, meta: entry.arm, showlegend: false, visible: !hidden.has(entry.arm)};
    if (entry.kind === "bar") {
      const error = entry.error && {type: "data", symmetric: false, array: [entry.error[0]], arrayminus: [entry.error[1]], thickness: 2, color: palette().text};
      return {...common, type: "bar", text: entry.text, textposition: "inside", insidetextanchor: "start", textangle: 0,
        textfont: {color: "#ffffff"}, marker: {color: colour, opacity: 0.9}, width: 0.6, error_y: error || {visible: false}};
    }
    const mode = {line: "lines", points: "markers", "line-points": "lines+markers"}[entry.kind];
    return {...common, type: "scatter", mode, line: {color: colour, dash: DASHES[number], width: number === 0 ? 3 : 1.8},
      marker: {color: colour, symbol: SYMBOLS[number], size: 7, line: {width: 1, color: palette().ground}}};
  }

  function palette() {
    if (isDark.matches && !printing) return {text: "#e6e9ed", line: "#363c44", ground: "#1d2127", band: "rgba(163,172,184,.22)"};
    return {text: "#1b1f24", line: "#d0d7de", ground: "#ffffff", band: "rgba(87,96,106,.16)"};
  }

  function layout(chart) {
    const {text, line, band} = palette();
    const axis = {gridcolor: line, zerolinecolor: text, zerolinewidth: 1, linecolor: line, automargin: true, title: {standoff: 8}};
    const isBar = chart.traces.some((entry) => entry.kind === "bar");
    return {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: text, size: 12},
      margin: {l: 8, r: 12, t: 8, b: 8}, hovermode: isBar ? "closest" : "x unified", bargap: 0.3,
      hoverlabel: {bgcolor: palette().ground, font: {color: text}}, dragmode: false,
      xaxis: {...axis, title: {text: chart.x_title, standoff: 8}, zeroline: false, type: isBar ? "category" : "linear", nticks: 6,
        rangemode: isBar ? "normal" : "tozero"},
      yaxis: {...axis, title: {text: chart.y_title, standoff: 8}, zeroline: isBar || chart.id === "gap-step",
        rangemode: chart.id === "gap-step" ? "tozero" : "normal"},
      shapes: chart.band ? [{type: "rect", xref: "paper", x0: 0, x1: 1, y0: chart.band[0], y1: chart.band[1], fillcolor: band, line: {width: 0}, layer: "below"}] : [],
    };
  }

  const place = (chart) => document.getElementById(`chart-${chart.id}`);

  function draw() {
    for (const chart of data.charts) {
      const size = printing ? PRINT_SIZE : {width: undefined, height: undefined};
      Plotly.react(place(chart), chart.traces.map(trace), {...layout(chart), ...size}, {responsive: true, displaylogo: false, displayModeBar: false});
    }
  }

  for (const button of document.querySelectorAll(".toggle")) {
    const arm = button.dataset.arm;
    button.querySelector(".swatch").style.color = COLOURS[style(arm)];
    button.querySelector(".swatch").style.borderTopStyle = {solid: "solid", dot: "dotted"}[DASHES[style(arm)]] || "dashed";
    button.addEventListener("click", () => {
      const shows = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shows));
      hidden[shows ? "delete" : "add"](arm);
      draw();
    });
  }

  isDark.addEventListener("change", draw);
  addEventListener("beforeprint", () => { printing = true; draw(); });
  addEventListener("afterprint", () => { printing = false; draw(); });
  draw();
})();
