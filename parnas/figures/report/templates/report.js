"use strict";
(() => {
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const paper = window.matchMedia("print");

  function startPlayer(figure) {
    const data = JSON.parse(figure.querySelector(".pi-data").textContent);
    const cells = figure.querySelectorAll(".cell");
    const [step, tau, string, slider, button] = [".now .step", ".now .tau", ".now .string", ".slider", ".play"]
      .map((name) => figure.querySelector(name));
    const last = data.steps.length - 1;
    let shown = last;
    let timer = null;

    function show(index) {
      shown = index;
      cells.forEach((cell, place) => {
        const percent = data.pi[index][place];
        const [block, candidate] = [Math.floor(place / data.candidates), place % data.candidates];
        cell.style.setProperty("--share", `${percent}%`);
        cell.classList.toggle("chosen", data.derived[index][block] === candidate);
        if (cell.textContent) cell.textContent = (percent / 100).toFixed(2);
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
