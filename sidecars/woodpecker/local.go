package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/zilliztech/woodpecker/common/config"
	"github.com/zilliztech/woodpecker/server/storage/codec"
)

// localStorage is a folder of segments on this machine, taken for this process by a lock on the whole of it.
//
// Woodpecker fences a segment there by a file, at which its writer looks a hundred times a second: one that is stopped
// between a look and its write acknowledges what the next writer does not see. With the lock there never is another
// writer. So the five seconds are needless, too, for which Woodpecker waits where it completes or fences a segment that
// has a lock file: in its own process as well, and behind a process that was killed.
type localStorage struct {
	folder string
	lock   *os.File
}

// takeLocal takes the folder that the settings name; nil where the segments are in an object store.
func takeLocal(settings *config.Configuration) (*localStorage, error) {
	if !settings.Woodpecker.Storage.IsStorageLocal() {
		return nil, nil
	}
	folder := filepath.Join(settings.Woodpecker.Storage.RootPath, settings.Minio.RootPath)
	lock, err := locked(folder)
	if err != nil {
		return nil, err
	}
	stale, err := filepath.Glob(filepath.Join(folder, "*", "*", "write.lock"))
	for _, path := range stale {
		if err == nil {
			err = os.Remove(path)
		}
	}
	return &localStorage{folder, lock}, err
}

// began is told of a segment that this process has begun to write.
func (l *localStorage) began(log, segment int64) {
	if l != nil {
		_ = os.Remove(filepath.Join(l.folder, fmt.Sprint(log), fmt.Sprint(segment), "write.lock"))
	}
}

// reopen makes a segment ready to be fenced that etcd holds for active. Where a writer was killed between the footer of
// a segment without entries and etcd, Woodpecker would refuse that footer, and so the log's next writer, for ever; what
// has no footer it completes as it does after any kill.
func (l *localStorage) reopen(log, segment int64) error {
	file, err := os.OpenFile(filepath.Join(l.folder, fmt.Sprint(log), fmt.Sprint(segment), "data.log"), os.O_RDWR, 0)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	end, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	last := make([]byte, min(end, int64(codec.GetMaxFooterReadSize())))
	if _, err = file.ReadAt(last, end-int64(len(last))); err != nil {
		return err
	}
	footer, err := codec.ParseFooterFromBytes(last)
	if err != nil || footer.TotalBlocks > 0 {
		return nil // it has no footer, or one that Woodpecker takes
	}
	return file.Truncate(int64(footer.IndexOffset))
}
