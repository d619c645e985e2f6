// The width of an element in CSS pixels, as it changes.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

/** Returns a reference for the element, and its width; 0 before the first layout. */
export function useWidth<T extends HTMLElement>(): [RefObject<T | null>, number] {
  const element = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const now = element.current;
    if (now === null) return;
    setWidth(now.clientWidth);
    const observer = new ResizeObserver(() => setWidth(now.clientWidth));
    observer.observe(now);
    return () => observer.disconnect();
  }, []);
  return [element, width];
}
