package main

import (
	"reflect"
	"strings"
	"testing"

	"github.com/zilliztech/woodpecker/common/config"
	"gopkg.in/yaml.v3"
)

// Every key of the library is in woodpecker.yaml: none takes a built-in default.
func TestEveryKeyIsWritten(t *testing.T) {
	var written map[string]any
	if err := yaml.Unmarshal(defaults, &written); err != nil {
		t.Fatal(err)
	}
	if missing := missingKeys(reflect.TypeFor[config.Configuration](), written, ""); len(missing) > 0 {
		t.Fatalf("missing: %v", missing)
	}
}

func TestTheFileIsValid(t *testing.T) {
	settings, err := loaded(nil)
	if err != nil {
		t.Fatal(err)
	}
	if interval := settings.Woodpecker.Logstore.SegmentSyncPolicy.MaxInterval.Milliseconds(); interval != 200 {
		t.Fatalf("acknowledgements come after %d ms", interval)
	}
}

func missingKeys(section reflect.Type, written map[string]any, path string) []string {
	var missing []string
	for field := range section.Fields() {
		key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if key == "" {
			continue
		}
		value, there := written[key]
		if !there {
			missing = append(missing, path+key)
		} else if below, isSection := value.(map[string]any); isSection {
			missing = append(missing, missingKeys(field.Type, below, path+key+".")...)
		}
	}
	return missing
}
