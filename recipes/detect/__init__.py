"""Detection with instance masks on COCO data: FCOS with CondInst's dynamic mask head."""
