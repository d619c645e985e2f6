import { View } from "../app/View";

export default function TreeView() {
  return (
    <View name="tree" title="Prefix tree">
      <p class="empty">Nothing here yet.</p>
    </View>
  );
}
