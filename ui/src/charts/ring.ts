// The newest values of a series.

/** Keeps the newest `capacity` items, oldest first. */
export class Ring<T> {
  private items: T[] = [];

  constructor(readonly capacity: number) {}

  get length(): number {
    return this.items.length;
  }

  push(...added: readonly T[]): void {
    this.items.push(...(added.length > this.capacity ? added.slice(-this.capacity) : added));
    if (this.items.length > this.capacity) this.items = this.items.slice(-this.capacity);
  }

  clear(): void {
    this.items = [];
  }

  /** A copy, oldest first. */
  toArray(): T[] {
    return [...this.items];
  }

  get first(): T | undefined {
    return this.items[0];
  }

  get last(): T | undefined {
    return this.items[this.items.length - 1];
  }

  /** The newest item for which `is` holds. */
  newest(is: (item: T) => boolean): T | undefined {
    for (let i = this.items.length - 1; i >= 0; i--) {
      const item = this.items[i] as T;
      if (is(item)) return item;
    }
    return undefined;
  }
}
