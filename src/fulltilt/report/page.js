"use strict";
// The page reads without this script. It adds a switch between light and dark, and figures under the pointer.

{
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const remembered = (() => { try { return localStorage.getItem("fulltilt-theme"); } catch { return null; } })();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
  const isDark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("fulltilt-theme", root.dataset.theme); } catch { /* a private window forgets */ }
  });
}

for (const figure of document.querySelectorAll(".chart")) {
  const plot = figure.querySelector(".plot");
  const drawing = figure.querySelector(".drawing");
  const top = Number(figure.dataset.top);
  const wall = Number(figure.dataset.wall);

  // The lines' own coordinates carry their values, so that no figure is stored twice.
  const lines = [...figure.querySelectorAll(".stroke")].map(path => ({
    label: path.dataset.label,
    points: [...path.getAttribute("d").matchAll(/(\d+),(\d+)/g)].map(([, x, y]) => [Number(x), Number(y)]),
  }));
  const areas = [...figure.querySelectorAll(".area")].map(path => ({
    label: path.dataset.label,
    shares: path.dataset.shares.split(" ").map(Number),
  }));

  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  const reading = document.createElement("div");
  reading.className = "reading";

  const short = value => value >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  const moment = s => s < 60 ? `${short(s)} s`
    : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`
    : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);

  const show = event => {
    const box = plot.getBoundingClientRect();
    const place = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const figures = lines.map(({ label, points }) => {
      const y = nearest(points, place * 1000)[1];
      return [lines.length > 1 ? label : "", `${short((1 - y / 1000) * top)} ${figure.dataset.unit}`];
    });
    const largest = areas
      .map(({ label, shares }) => [label, shares[Math.min(Math.floor(place * shares.length), shares.length - 1)]])
      .filter(([, share]) => share > 0)
      .sort((a, b) => b[1] - a[1])
      .slice(0, 3)
      .map(([label, share]) => [label, `${share} %`]);
    reading.replaceChildren(moment(place * wall));
    for (const [label, value] of [...figures, ...largest]) {
      const bold = document.createElement("b");
      bold.textContent = value;
      reading.append(` · ${label} `, bold);
    }
    cursor.setAttribute("d", `M${place * 1000},0 ${place * 1000},1000`);
    if (!reading.isConnected) { figure.append(reading); drawing.append(cursor); }
  };
  const hide = () => { reading.remove(); cursor.remove(); };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}
