// A formula in the text that is wider than its paragraph scrolls in its own box. It fills its line
// then, so the box costs no alignment; narrower formulas stay as they are.
(() => {
  const blocks = "p, li, dd, dt, td, th, figcaption, h1, h2, h3";
  const fit = () => {
    for (const formula of document.querySelectorAll("mjx-container:not([display])")) {
      formula.classList.remove("pr-wide");
      const block = formula.closest(blocks);
      const wide = block && formula.getBoundingClientRect().width > block.clientWidth;
      formula.classList.toggle("pr-wide", Boolean(wide));
    }
  };
  addEventListener("load", () => window.MathJax?.startup?.promise?.then(fit));
  addEventListener("resize", fit);
})();
