package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/zilliztech/woodpecker/server/storage/codec"
)

func TestReopenCutsTheFooterOfASegmentWithoutEntries(t *testing.T) {
	header := codec.EncodeRecord(&codec.HeaderRecord{Version: codec.FormatVersion})
	footer := func(blocks int32, index uint32) []byte {
		return codec.EncodeRecord(&codec.FooterRecord{
			TotalBlocks: blocks, IndexOffset: uint64(len(header)), IndexLength: index, Version: codec.FormatVersion, LAC: -1,
		})
	}
	index := make([]byte, 45)
	for name, each := range map[string]struct{ file, left []byte }{
		"empty":      {join(header, footer(0, 0)), header},
		"filled":     {join(header, index, footer(1, uint32(len(index)))), nil},
		"unfinished": {header, nil},
		"cut":        {header[:5], nil},
		"nothing":    {[]byte{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			storage := &localStorage{folder: t.TempDir()}
			path := filepath.Join(storage.folder, "7", "3", "data.log")
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, each.file, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := storage.reopen(7, 3); err != nil {
				t.Fatal(err)
			}
			found, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if each.left == nil {
				each.left = each.file
			}
			if string(found) != string(each.left) {
				t.Errorf("%d bytes are left, not %d", len(found), len(each.left))
			}
		})
	}
	if err := (&localStorage{folder: t.TempDir()}).reopen(7, 3); err != nil {
		t.Errorf("a segment without a file: %v", err)
	}
}

func join(parts ...[]byte) []byte {
	var all []byte
	for _, part := range parts {
		all = append(all, part...)
	}
	return all
}
