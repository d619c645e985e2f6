// What survives a reload of the page: it is kept in the tab's session storage, and ends with the tab.
//
// Names end in the version of what they hold: only this version of the page wrote it, so it is read unchecked.
import { effect, signal, type ReadonlySignal } from "@preact/signals";

const SAVE_AFTER_MS = 300;

/** The value that was stored, or undefined. */
export function stored(name: string): unknown {
  try {
    const found = sessionStorage.getItem(name);
    return found === null ? undefined : (JSON.parse(found) as unknown);
  } catch {
    return undefined; // storage may be forbidden
  }
}

/** Stores a value; undefined removes it. False if there is no room for it. */
export function store(name: string, value: unknown): boolean {
  try {
    if (value === undefined) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Stores the value of `read` soon after a signal that `watch` reads has changed, and when the page is left. Returns
 * whether there was room for the newest one: if not, an older one stays.
 */
export function keepStored(name: string, watch: () => void, read: () => unknown): ReadonlySignal<boolean> {
  const isKept = signal(true);
  let timer: ReturnType<typeof setTimeout> | undefined;
  const save = (): void => {
    clearTimeout(timer);
    timer = undefined;
    isKept.value = store(name, read());
  };
  let isFirst = true;
  effect(() => {
    watch();
    if (isFirst) isFirst = false;
    else timer ??= setTimeout(save, SAVE_AFTER_MS);
  });
  addEventListener("pagehide", save);
  return isKept;
}
