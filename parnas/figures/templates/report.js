"use strict";
(() => {
  const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const paper = window.matchMedia("print");
  const BACK = ["#ffffff", "#171b22"];

  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const mix = (one, other, share) => one.map((part, i) => Math.round(part + share * (other[i] - part)));
  const luminance = (colour) => {
    const [red, green, blue] = colour.map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  // Black where it has more contrast than white: (l + 0.05) / 0.05 against 1.05 / (l + 0.05).
  const inkOn = (colour) => ((luminance(colour) + 0.05) ** 2 > 0.0525 ? "#000000" : "#ffffff");

  function startPlayer(figure) {
    const data = JSON.parse(figure.querySelector(".pi-data").textContent);
    const cells = [...figure.querySelectorAll(".cell")];
    const values = [...figure.querySelectorAll(".value")];
    const frames = [...figure.querySelectorAll(".chosen")];
    const [step, tau, string] = ["step", "tau", "string"].map((name) => figure.querySelector(".now ." + name));
    const slider = figure.querySelector(".slider");
    const button = figure.querySelector(".play");
    const candidates = data.shades.length;
    const last = data.steps.length - 1;
    let shown = last;
    let timer = null;

    function show(index) {
      const mode = dark.matches ? 1 : 0;
      const back = parts(BACK[mode]);
      const full = data.shades.map((shade) => parts(shade[mode]));
      shown = index;
      data.pi[index].forEach((percent, place) => {
        const colour = mix(back, full[place % candidates], percent / 100);
        cells[place].setAttribute("fill", `rgb(${colour.join(",")})`);
        if (data.values) {
          values[place].setAttribute("fill", inkOn(colour));
          values[place].textContent = (percent / 100).toFixed(2);
        }
      });
      data.derived[index].forEach((candidate, block) => {
        const cell = cells[block * candidates + candidate];
        frames[block].setAttribute("x", cell.getAttribute("x"));
        frames[block].setAttribute("y", cell.getAttribute("y"));
      });
      step.textContent = data.steps[index].toLocaleString("en");
      tau.textContent = data.taus[index].toFixed(3);
      string.textContent = data.strings[index];
      if (slider) {
        slider.value = String(index);
        slider.setAttribute("aria-valuetext",
          `step ${step.textContent}, tau ${tau.textContent}, ${data.strings[index].slice(0, 120)}`);
      }
    }

    function pause() {
      clearInterval(timer);
      timer = null;
      button.querySelector(".sign").textContent = "▶";
      button.querySelector(".word").textContent = "Play";
    }

    function play() {
      if (shown === last) show(0);
      button.querySelector(".sign").textContent = "❚❚";
      button.querySelector(".word").textContent = "Pause";
      const pace = calm.matches ? 700 : Math.min(160, Math.max(60, 9000 / last));
      timer = setInterval(() => (shown < last ? show(shown + 1) : pause()), pace);
    }

    if (slider) {
      slider.addEventListener("input", () => { pause(); show(Number(slider.value)); });
      button.addEventListener("click", () => (timer === null ? play() : pause()));
    }
    dark.addEventListener("change", () => show(shown));
    show(last);
    return () => { if (slider) pause(); show(last); };
  }

  function makeSortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const order = [...body.rows];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const key = (row) => {
        const cell = row.cells[column];
        const given = cell.dataset.value;
        return head.classList.contains("n") ? (given === undefined ? null : Number(given)) : given || cell.textContent;
      };
      const sorted = [...order].sort((one, other) => {
        const [a, b] = [key(one), key(other)];
        if (a === null || b === null) return (a === null) - (b === null);
        const less = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
        return up ? less : -less;
      });
      heads.forEach((each) => each.setAttribute("aria-sort", each === head ? (up ? "ascending" : "descending") : "none"));
      body.append(...sorted);
    }));
  }

  const atRest = [...document.querySelectorAll(".player")].map(startPlayer);
  document.querySelectorAll("table.sortable").forEach(makeSortable);

  let opened = [];
  function toPaper() {
    opened = opened.concat([...document.querySelectorAll("details:not([open])")]);
    opened.forEach((each) => { each.open = true; });
    atRest.forEach((rest) => rest());
  }
  function fromPaper() {
    opened.forEach((each) => { each.open = false; });
    opened = [];
    atRest.forEach((rest) => rest());
  }
  window.addEventListener("beforeprint", toPaper);
  window.addEventListener("afterprint", fromPaper);
  paper.addEventListener("change", () => (paper.matches ? toPaper() : fromPaper()));
})();
