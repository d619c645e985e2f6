// Modal dialogs hold the page still: it does not scroll behind them, and its place for a scroll bar is covered too.

/** Shows the dialog above the page; the style of `html` hides its scroll bar while one is shown. */
export function showModal(dialog: HTMLDialogElement): void {
  const page = document.documentElement;
  // Under a dialog that is already shown there is no scroll bar to measure.
  if (!document.querySelector("dialog:modal"))
    page.style.setProperty("--scroll-bar", `${innerWidth - page.getBoundingClientRect().width}px`);
  dialog.showModal();
}
