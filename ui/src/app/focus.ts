// Where the keyboard goes on when what had the focus is replaced, removed or disabled.

/** After the next change of the document, focuses the first of these that can have the focus. */
export function focusNext(...selectors: string[]): void {
  requestAnimationFrame(() => {
    const found = selectors.map((one) => document.querySelector<HTMLElement>(`main ${one}:not(:disabled)`));
    found.find((one) => one !== null)?.focus();
  });
}
