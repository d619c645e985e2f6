import { View } from "../app/View";

export default function PlaygroundView() {
  return (
    <View name="playground" title="Playground">
      <p class="empty">Nothing here yet.</p>
    </View>
  );
}
