"use strict";
(() => {
  const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const paper = window.matchMedia("print");
  const BACKGROUNDS = [[255, 255, 255], [23, 27, 34]];

  const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const linear = (channel) => (channel <= 10 ? channel / 3294.6 : ((channel / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(colour[i]), 0);
  // Black where it has more contrast than white: (l + 0.05) / 0.05 against 1.05 / (l + 0.05).
  const inkOn = (colour) => ((luminance(colour) + 0.05) ** 2 > 0.0525 ? "#000000" : "#ffffff");

  function startPlayer(figure) {
    const data = JSON.parse(figure.querySelector(".pi-data").textContent);
    const [cells, values, frames] = [".cell", ".value", ".chosen"].map((name) => [...figure.querySelectorAll(name)]);
    const [step, tau, string, slider, button] = [".now .step", ".now .tau", ".now .string", ".slider", ".play"]
      .map((name) => figure.querySelector(name));
    const candidates = data.shades.length;
    const last = data.steps.length - 1;
    let shown = last;
    let timer = null;

    function show(index) {
      const mode = dark.matches ? 1 : 0;
      const full = data.shades.map((shade) => channels(shade[mode]));
      shown = index;
      data.pi[index].forEach((percent, place) => {
        const [from, to] = [BACKGROUNDS[mode], full[place % candidates]];
        const colour = from.map((channel, i) => Math.round(channel + percent / 100 * (to[i] - channel)));
        cells[place].setAttribute("fill", `rgb(${colour.join(",")})`);
        if (values.length) {
          values[place].setAttribute("fill", inkOn(colour));
          values[place].textContent = (percent / 100).toFixed(2);
        }
      });
      data.derived[index].forEach((candidate, block) => {
        const cell = cells[block * candidates + candidate];
        ["x", "y"].forEach((axis) => frames[block].setAttribute(axis, cell.getAttribute(axis)));
      });
      step.textContent = data.steps[index].toLocaleString("en");
      tau.textContent = data.taus[index].toFixed(3);
      string.textContent = data.strings[index];
      if (slider) {
        slider.value = String(index);
        slider.ariaValueText = `step ${step.textContent}, tau ${tau.textContent}, ${data.strings[index].slice(0, 120)}`;
      }
    }

    function label(sign, word) {
      button.querySelector(".sign").textContent = sign;
      button.querySelector(".word").textContent = word;
    }

    function pause() {
      clearInterval(timer);
      timer = null;
      if (button) label("▶", "Play");
    }

    function play() {
      if (shown === last) show(0);
      label("❚❚", "Pause");
      const pace = calm.matches ? 700 : Math.min(160, Math.max(60, 9000 / last));
      timer = setInterval(() => (shown < last ? show(shown + 1) : pause()), pace);
    }

    if (slider) {
      slider.addEventListener("input", () => { pause(); show(Number(slider.value)); });
      button.addEventListener("click", () => (timer === null ? play() : pause()));
    }
    dark.addEventListener("change", () => show(shown));
    show(last);
    return () => { pause(); show(last); };
  }

  function makeSortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const original = [...body.rows];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      const numeric = head.classList.contains("n");
      const text = (row) => row.cells[column].dataset.value ?? (numeric ? "" : row.cells[column].textContent);
      const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
      // Rows without a figure stay at the end in both directions.
      body.append(...[...original].sort((one, other) => {
        const [a, b] = [text(one), text(other)];
        return a && b ? sign * compare(a, b) : !a - !b;
      }));
      heads.forEach((each) => { each.ariaSort = each !== head ? "none" : sign > 0 ? "ascending" : "descending"; });
    }));
  }

  const showLast = [...document.querySelectorAll(".player")].map(startPlayer);
  document.querySelectorAll("table.sortable").forEach(makeSortable);

  let opened = [];
  function print(starts) {
    if (starts) opened.push(...document.querySelectorAll("details:not([open])"));
    opened.forEach((each) => { each.open = starts; });
    if (!starts) opened = [];
    showLast.forEach((show) => show());
  }
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  paper.addEventListener("change", () => print(paper.matches));
})();
